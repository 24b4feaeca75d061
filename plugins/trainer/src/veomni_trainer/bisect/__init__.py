"""``veomni bisect``: finds the sites at which a job's run leaves the same job all-eager."""
