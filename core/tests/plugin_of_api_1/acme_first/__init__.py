"""A plugin that was written for version 1 of the plugin API. It is never edited: users have plugins like it."""
