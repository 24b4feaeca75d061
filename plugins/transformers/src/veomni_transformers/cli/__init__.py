"""The subcommands that build models."""
