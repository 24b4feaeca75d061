"""Images, video and audio of rows: found, decoded, and given to the model's processor."""
