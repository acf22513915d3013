"""What happened, told one way: typed events, spool, metrics, evidence."""
