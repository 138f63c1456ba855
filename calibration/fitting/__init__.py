"""From keys and values to scales: statistics are gathered, ranges are searched, and what they cost is diagnosed."""
