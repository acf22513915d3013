"""The sidecar: listener, exchange, ledger, observer, commands. The only room that calls the others."""
