"""The journal: one rank's records on its own disk, append-only, checksummed, in segments, readable while written.

`JournalWriter` appends, `JournalReader` follows; `codec` turns a record into bytes and back, `segments` knows the files.
One writer per directory, any number of readers in any process. No locks, no mmap: it works on network file systems. The
format is one page: docs/journal.md.
"""

from trackbridge.journal.reader import Damage as Damage
from trackbridge.journal.reader import JournalReader as JournalReader
from trackbridge.journal.writer import JournalWriter as JournalWriter
from trackbridge.journal.writer import last_seq as last_seq

__all__ = ["Damage", "JournalReader", "JournalWriter", "last_seq"]
