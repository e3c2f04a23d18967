"""A mail-order shop: customers with a request each, and the tools that a support agent has."""

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["parcel", "refund", "exchange", "address"]
FAMILIES: tuple[Family, ...] = ("parcel", "refund", "exchange", "address")
NORDPOST, BALTIC = "Nordpost", "Baltic Cargo"

_NAMES = (
    *("Ada Lindqvist", "Bruno Ferri", "Chiara Weber", "Daan Visser", "Elif Demir", "Farid Haddad", "Greta Holm"),
    *("Hugo Martins", "Ines Kovac", "Jonas Berg", "Katya Orlova", "Liam Byrne", "Mina Sato", "Noor Aziz"),
    *("Oskar Nowak", "Priya Nair", "Quentin Moreau", "Rosa Jimenez", "Sven Dahl", "Tara Singh", "Umar Khan"),
    *("Vera Novak", "Wout Peeters", "Yara Costa"),
)
_ITEMS = (
    *(("wool jacket", 129), ("trail shoes", 94), ("rain poncho", 38), ("linen shirt", 52), ("work boots", 145)),
    *(("ski gloves", 41), ("denim skirt", 60), ("down vest", 88), ("hiking trousers", 76), ("running tights", 49)),
)
_CITIES = ("Malmo", "Gdansk", "Tallinn", "Aarhus", "Lubeck", "Turku", "Riga", "Bergen")
_ASKED: dict[Family, tuple[str, ...]] = {
    "parcel": (
        "Hi, this is {name}. I ordered a {item} and nothing has come. Where is order {order}, and when do I get it?",
        "Order {order} should have been here days ago. Can you tell me where my {item} is? {name}",
        "{name} here. My neighbour got hers, my {item} is still missing (order {order}). Which day will it arrive?",
    ),
    "refund": (
        "I sent the {item} of order {order} back {days} days ago. I would like my money back, please. {name}",
        "Hello, {name} speaking. The {item} from order {order} had a torn seam, it went back. What do I get refunded?",
        "Please refund order {order}, the {item} did not suit me. It went back {days} days ago. Regards, {name}",
    ),
    "exchange": (
        "The {item} I got with order {order} is too small. Could I have it in {size} instead? {name}",
        "Hello! Wrong size again. I need the {item} in {size}, order {order}. Thanks, {name}",
        "{name}, order {order}. Please swap the {item} for a {size}; I would rather not get the money.",
    ),
    "address": (
        "I am moving to {city} on Monday. Please send order {order} to 14 Harbour Street there. {name}",
        "Hi, {name} here. Order {order} must not go to my old flat. New address: 14 Harbour Street, {city}.",
        "Could you change the delivery address of {order}? It is 14 Harbour Street, {city}, from now on. {name}",
    ),
}
SYSTEM = (
    "You work for the customer service of Fjordwear, a mail-order shop. Settle the customer's request with the tools, "
    "by the shop's rules: look the order up first; a refund is what the policy says, not the price; an address is "
    "changed only for a verified customer; an exchange is booked, labelled and sent. Then answer in one message."
)
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "find_customer": ("name",),
    "find_order": ("order_id",),
    "track_parcel": ("parcel_id",),
    "check_policy": ("sku", "reason"),
    "refund": ("order_id", "amount"),
    "check_stock": ("sku", "size"),
    "reserve_item": ("sku", "size"),
    "create_label": ("order_id",),
    "send_label": ("order_id", "email"),
    "verify_customer": ("customer_id",),
    "change_address": ("order_id", "street", "city"),
    "search_help": ("query",),
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in keys}},
        },
    }
    for name, keys in _PARAMETERS.items()
]


@dataclass(frozen=True, slots=True)
class Task:
    """What a customer wants; the same in every round."""

    family: Family
    index: int
    name: str
    item: str
    price: int
    order: str
    customer: str
    size: str
    city: str
    days: int
    carrier: str
    is_easy: bool
    """Every rollout of it succeeds: its groups are dead."""

    @property
    def task_id(self) -> str:
        """As in `refund-3`."""
        return f"{self.family}-{self.index + 1}"

    @property
    def sku(self) -> str:
        """Of the item."""
        return f"{self.item[:3].upper()}-{self.price}"

    @property
    def asked(self) -> str:
        """The customer's message."""
        texts = _ASKED[self.family]
        values = {name: getattr(self, name) for name in ("name", "item", "order", "size", "city", "days")}
        return texts[self.index % len(texts)].format(**values)

    def record(self) -> str:
        """What `find_order` says."""
        return json.dumps(
            {
                "order_id": self.order,
                "customer_id": self.customer,
                "sku": self.sku,
                "item": self.item,
                "paid": self.price,
                "parcel_id": f"P{self.order[1:]}",
                "carrier": self.carrier,
            }
        )


def tasks(per_family: int, seed: int = 0, *, is_test: bool = False) -> list[Task]:
    """The shop's tasks, some of each family; those for testing are other customers, none with Nordpost."""
    rng = random.Random(f"shop {seed} {is_test}")
    names = rng.sample(_NAMES, len(_NAMES))
    orders = []
    for family in FAMILIES:
        for index in range(per_family):
            item, price = rng.choice(_ITEMS)
            is_easy = index == per_family - 1
            number = rng.randrange(10_000, 99_999)
            orders.append(
                Task(
                    family=family,
                    index=index + 100 * is_test,
                    name=names[len(orders) % len(names)],
                    item=item,
                    price=price,
                    order=f"F{number}",
                    customer=f"C{rng.randrange(1_000, 9_999)}",
                    size=rng.choice(("S", "M", "L", "XL")),
                    city=rng.choice(_CITIES),
                    days=rng.randrange(4, 25),
                    carrier=BALTIC if is_test or is_easy or index == 0 else NORDPOST,
                    is_easy=is_easy,
                )
            )
    return orders
