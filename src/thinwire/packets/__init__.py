"""Messages ↔ bytes: one versioned, length-prefixed packet for both modes. No torch, no sockets."""

from thinwire.packets.batch import MAX_BATCHED_NBYTES as MAX_BATCHED_NBYTES
from thinwire.packets.batch import BatchedTensor as BatchedTensor
from thinwire.packets.batch import EncodedTensor as EncodedTensor
from thinwire.packets.packet import HEAD_NBYTES as HEAD_NBYTES
from thinwire.packets.packet import LENGTH_NBYTES as LENGTH_NBYTES
from thinwire.packets.packet import PORTION_NBYTES as PORTION_NBYTES
from thinwire.packets.packet import VERSION as VERSION
from thinwire.packets.packet import PacketLimits as PacketLimits
from thinwire.packets.packet import kind_of as kind_of
from thinwire.packets.packet import nbytes_of as nbytes_of
from thinwire.packets.packet import pack as pack
from thinwire.packets.packet import parse as parse
from thinwire.packets.packet import portions as portions
from thinwire.packets.packet import segments as segments
