"""How a run is shown: progress while it trains, then the comparison, the charts and the page."""
