"""vLLM's block pool, counted instead of listed: which blocks are free, and in which order they are reused.

SOURCE: vllm/v1/core/block_pool.py (0.32.0): BlockPool.get_new_blocks, touch, free_blocks; and
vllm/v1/core/single_type_kv_cache_manager.py: FullAttentionManager.find_longest_cache_hit.

A block without a hash can never be hit, so such blocks are interchangeable and only their number is kept. Since vLLM
0.23 they are put at the front of the free queue, so the queue is always: unhashed blocks, then hashed ones in the
order in which they were freed.

A hashed block past the shared prefix can only be hit by the request that computed it, after a preemption. A request
frees its blocks last first, and the queue is eaten from the front, so what is left of them is always a leading run:
one number per request. Only blocks of shared prefixes are kept one by one.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class SharedBlock:
    """One cached block of a shared prefix: block `index` of that prefix, in one of possibly several copies."""

    __slots__ = ("copies", "references")

    def __init__(self, copies: "list[SharedBlock]") -> None:
        self.copies = copies
        self.references = 1
        copies.append(self)


class BlockPool:
    """Free blocks in the order of reuse, and the prefixes that can be hit.

    `unit` is how many blocks one block of tokens costs in the groups that are cached: 1 unless the model is hybrid.
    """

    __slots__ = ("_chains", "_evict_unhashed_first", "_recycled", "_unhashed", "_unit", "free")

    def __init__(self, usable_blocks: int, *, unit: int = 1, evict_unhashed_first: bool = True) -> None:
        self.free = usable_blocks
        self._unhashed = usable_blocks  # at the front of the queue
        self._recycled: OrderedDict[Hashable, int] = OrderedDict()  # the rest of the queue: owner -> number of blocks
        self._chains: dict[str, list[list[SharedBlock]]] = {}
        self._unit = unit
        self._evict_unhashed_first = evict_unhashed_first

    def take(self, blocks: int) -> None:
        """Pop blocks from the front of the queue; popping a cached one evicts it. The caller checked `free`.

        Fewer than none puts blocks back to the front.
        """
        self.free -= blocks
        missing = blocks - self._unhashed
        if missing <= 0:
            self._unhashed -= blocks
            return
        self._unhashed = 0
        recycled = self._recycled
        while missing > 0:
            owner = next(iter(recycled))
            size = recycled[owner]
            if isinstance(owner, SharedBlock):
                owner.copies.remove(owner)
                if size > missing:  # a hybrid model's block of tokens lost some of its blocks, so all of it
                    self._unhashed = size - missing
            elif size > missing:
                recycled[owner] = size - missing
                return
            del recycled[owner]
            missing -= size

    def give_back(self, *, owner: Hashable, unhashed: int, own: int, shared: Sequence[SharedBlock]) -> None:
        """Free a request's blocks, last first: `unhashed` blocks, `own` hashed ones, then its shared ones."""
        if self._evict_unhashed_first:
            self._unhashed += unhashed
        elif unhashed:
            self._recycled[object()] = unhashed
        self.free += unhashed + own
        if own:
            self._recycled[owner] = own
        unit = self._unit
        for block in reversed(shared):
            block.references -= 1
            if block.references == 0:
                self._recycled[block] = unit
                self.free += unit

    def own_hits(self, owner: Hashable) -> int:
        """Blocks of tokens past the shared prefix that are still cached for `owner`."""
        return self._recycled.get(owner, 0) // self._unit

    def shared_hits(self, prefix: str, limit: int) -> list[SharedBlock]:
        """The longest cached run from the start of `prefix`, of at most `limit` blocks of tokens."""
        hits: list[SharedBlock] = []
        for copies in self._chains.get(prefix, ())[:limit]:
            if not copies:
                break
            hits.append(copies[0])
        return hits

    def claim(self, *, owner: Hashable, own: int, shared: Sequence[SharedBlock]) -> None:
        """Take hit blocks into use: off the queue if nobody else holds them."""
        unit = self._unit
        for block in shared:
            if block.references == 0:
                del self._recycled[block]
                self.free -= unit
            block.references += 1
        if own:
            size = self._recycled.pop(owner)
            self.free -= own * unit
            self._unhashed += size - own * unit  # leftovers of a hybrid model's broken block of tokens

    def share(self, prefix: str, index: int) -> SharedBlock:
        """Cache the block of tokens `index` of `prefix`, just computed and in use. A copy that exists is kept too."""
        chain = self._chains.setdefault(prefix, [])
        while len(chain) <= index:
            chain.append([])
        return SharedBlock(chain[index])
