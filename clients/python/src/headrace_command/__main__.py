"""`python -m headrace_command`: the command, without a script of its environment."""

from headrace_command import main

main()
