"""What is lost because a product's tiles do not fill its programs' last turn.

Knows nothing about a GPU: `schedule` says how tiles are shared out, the rest is counting.
"""

from bulletserve.kernels.cuda.matmul_choice import Choice, schedule


def wave_loss(choice: Choice, rows: int, cols: int, inner: int, sms: int) -> float:
    """Share of all programs' time in which they have no tile, 0 to 1; nan for a library's product.

    A program's time is the K steps of the tiles it takes, whole or shared.
    """
    if choice.kind != "triton":
        return float("nan")
    programs, streamed = schedule(choice, rows, cols, inner, sms)
    tiles = -(-rows // choice.block_m) * -(-cols // choice.block_n)
    steps = -(-inner // choice.block_k)
    longest = -(-streamed * steps // programs) + -(-(tiles - streamed) // programs) * steps
    return 1 - tiles * steps / (sms * choice.per_sm * longest)
