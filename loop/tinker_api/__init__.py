"""The client of servers of Tinker's API."""
