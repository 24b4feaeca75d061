"""What a run leaves behind: its folder, its files, and the metrics in them."""
