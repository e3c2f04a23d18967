"""What every reader stands on: bytes, values, documents, fields, and sniffing."""
