"""`python -m rlake.loop.cli`: the command line, for those who start modules, as torchrun does."""

from . import main

main()
