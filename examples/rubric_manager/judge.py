"""The judge of a text by a rubric: a stand-in for a language model, the same on every machine.

A criterion is met where the text holds its sign. README.md shows the function that asks a real model in its place.
"""

SIGNS = {
    "sources": "As the handbook says.",
    "risks": "Beware of fever.",
    "numbers": "It weighs 40 tons.",
    "drawings": "See figure 1.",
    "steps": "First stir, then bake.",
    "amounts": "Take two cups.",
    "clauses": "Clause 7 applies.",
    "dates": "It ends in May.",
    "examples": "Think of a bicycle.",
    "pictures": "A cat is drawn here.",
    "terms": "The tensor is symmetric.",
    "proofs": "Which was to be shown.",
    "costs": "It costs 90 a month.",
    "summary": "In short: it works.",
}
"""What a text says that meets a criterion."""


def judged(text: str, criteria: list[str]) -> float:
    """Share of the criteria that the text meets, 0 to 1; there is at least one."""
    return sum(criterion in SIGNS and SIGNS[criterion] in text for criterion in criteria) / len(criteria)
