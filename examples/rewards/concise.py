"""Pointwise, from what is said: long speeches to the user cost. The limit is an argument: --arg words=60."""

from pipelines.score import reward_function


@reward_function
def concise(messages, words: int = 80, **kwargs):
    spoken = [m.content.split() for m in messages if m.role == "assistant" and m.content]
    if not spoken:
        return {"score": None, "reason": "the agent said nothing"}
    return sum(len(text) <= words for text in spoken) / len(spoken)
