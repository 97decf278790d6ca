"""Which replica answers: pure choice and table, one driver."""
