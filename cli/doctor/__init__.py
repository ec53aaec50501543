"""The checks of `lorad doctor`: the database, engines and trainers, logout, processes left over,
and threads.
"""
