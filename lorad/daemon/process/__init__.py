"""Processes and users: start children through shims, signal them, become a user, and explain how a process
ended.
"""
