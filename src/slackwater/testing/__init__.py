"""What users need to test against Slackwater: fakes with gates, clocks, conformance suites."""
