"""The job's text: as documents, as token ids, as sequences, and in the order in which processes take them."""
