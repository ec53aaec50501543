"""What `lorad doctor` checks: the database, engines and trainers, logout, processes left over, and threads."""
