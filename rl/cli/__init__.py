"""Parts of all programs: arguments, help, exit codes, and sessions of saved runs."""
