from moe_comm.train.data.batches import (
    Batch as Batch,
    Corpus as Corpus,
    GlobalBatch as GlobalBatch,
    Prefetch as Prefetch,
    Statistics as Statistics,
)
from moe_comm.train.data.packing import IGNORE as IGNORE
from moe_comm.train.data.preparation import (
    prepare as prepare,
    prepare_all as prepare_all,
)
from moe_comm.train.data.settings import (
    CorpusSettings as CorpusSettings,
    SourceSpec as SourceSpec,
)
from moe_comm.train.data.tokenfile import (
    Description as Description,
    TokenFile as TokenFile,
    describe as describe,
    open_tokens as open_tokens,
)
from moe_comm.train.data.tokenizer import (
    ByteTokenizer as ByteTokenizer,
    FileTokenizer as FileTokenizer,
    Tokenizer as Tokenizer,
    load_tokenizer as load_tokenizer,
    train_bpe as train_bpe,
)
