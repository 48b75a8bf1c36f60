"""The command line: one file for each group of commands. Heavy imports happen inside the commands."""
