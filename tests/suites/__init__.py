"""What each test command runs, and what it costs."""
