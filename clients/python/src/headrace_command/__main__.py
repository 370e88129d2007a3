"""Runs the command as `python -m headrace_command`, for environments without its script."""

from headrace_command import main

main()
