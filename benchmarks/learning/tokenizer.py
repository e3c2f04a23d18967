"""A game's own tokenizer: byte pairs merged inside sentences, across words.

The games say the same sentences again and again ("To the North you see a closed wood door."), and a tokenizer that may
merge across spaces writes such a sentence in one or a few tokens. Episodes are then some hundred tokens long instead of
thousands, which is what makes the study fit on two cores. An action is one token and an end marker. Of the bytes, only
those that occur in the texts are there: an entry that no text uses would be sampled now and then.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainer.online.demo import CHAT_TEMPLATE, END, MARKERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SENTENCE = r"[^.\n]+[.]?\s*|[.\s]+"


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> "PreTrainedTokenizerFast":
    """A tokenizer with the demo's markers and chat template.

    Args:
        texts: messages of the game, as often as they occur.
        vocabulary: token ids, at most.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    sentences = pre_tokenizers.Split(Regex(_SENTENCE), "isolated")
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([sentences, splitter])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(MARKERS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[marker for marker in MARKERS if marker != END],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
