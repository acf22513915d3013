"""What Turngate does with HTTP, case by case: what differs from a direct connection, where, and why."""
