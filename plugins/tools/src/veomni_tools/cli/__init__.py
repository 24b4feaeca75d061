"""The subcommands tune, lock and new-plugin."""
