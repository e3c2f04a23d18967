"""Inspect Scout reads an exported folder as its transcript database: each transcript with its messages and metadata.

Argument: the folder.
"""

import asyncio
import json
import sys

from inspect_scout import columns as c
from inspect_scout import transcripts_from
from inspect_scout._transcript.types import TranscriptContent


async def read_transcripts(location):
    """Each transcript by its id, and how many an own column leaves."""
    everything = TranscriptContent(messages="all", events="all")
    read = {}
    transcripts = transcripts_from(location)
    async with transcripts.reader() as reader:
        async for info in reader.index():
            read[info.transcript_id] = (await reader.read(info, everything)).model_dump(mode="json")
    async with transcripts.where(c.env_return > 0.5).reader() as reader:
        good = [info.transcript_id async for info in reader.index()]
    return {"transcripts": read, "good": good}


print(json.dumps(asyncio.run(read_transcripts(sys.argv[1]))))
