"""Model calls: their addresses, the four APIs, matching of prompts, and steps built from calls."""
