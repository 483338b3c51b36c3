"""`rlake quickstart` and `rlake selftest`: does it learn on this machine?"""
