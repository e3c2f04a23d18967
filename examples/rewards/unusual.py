"""Batch-wise, with context that the whole batch shares: rollouts that use tools in an order few others do stand out."""

from collections import Counter

from calls import tool_calls

from pipelines.score import reward_function


@reward_function(mode="batch")
def unusual(rollouts_messages, **kwargs):
    orders = [tuple(name for name, _ in tool_calls(messages)) for messages in rollouts_messages]
    counts = Counter(orders)
    return [1 - counts[order] / len(orders) for order in orders]
