"""Pure judgement: the message graph, the rules, the stream assembler, the gate and the ledger machine."""
