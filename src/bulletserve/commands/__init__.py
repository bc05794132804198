"""The subcommands of `bullet`, one module each."""
