"""How well the tiles of a matrix product fill the SMs at hand.

Knows nothing about flops a second. A product [m, n] is cut into tiles; each SM takes tiles in turn, so the time is that
of ceil(tiles / SMs) of them and the last wave may be part-filled. Kernels choose their tiles for the rows and SMs at
hand (`kernels/cuda/matmul_choice`): smaller tiles fill waves better and compute less per byte; a tile may be shared by
several programs along k. The best of the ways counts here too, so the loss is steps with their tops cut off.

Prefill on a share of the SMs is cut `whole`: beside a decode that reads all the time, programs that share a tile lose
more to the memory than they save, so what was chosen there shares tiles only among SMs that would have none.
"""

_LARGE = ((128, 256, 0), (128, 128, 1))
_SMALL = ((64, 128, 2), (32, 128, 3), (16, 128, 4))
"""(rows, columns, halvings of the greatest tile that cost efficiency)."""

_MOST_SMALL_ROWS = 512  # above, tiles of fewer than 128 rows never win
_MOST_SMALL_WHOLE_ROWS = 64
_SHARERS = (1, 4, 16)


def same_tiles(m: int) -> int:
    """The greatest count of rows that is cut into the same tiles as `m`: `wave_factor` is that of it, times its ratio
    to m."""
    tile_m = _LARGE[0][0] if m > _MOST_SMALL_ROWS else _SMALL[-1][0]
    return -(-m // tile_m) * tile_m


def wave_factor(m: int, n: int, sms: float, small_tile: float, split_loss: float, *, whole: bool = False) -> float:
    """Time of a product over m * n * k / (rate * sms): 1 where whole large tiles fill every wave, else more.

    `small_tile`: efficiency per halving of the tile. `split_loss`: share of time that sharing tiles costs, for each
    fourfold of sharers. Never falls with m; m * n * `wave_factor` / sms never rises with sms; never less if `whole`.
    """
    best = float("inf")
    large = m > (_MOST_SMALL_WHOLE_ROWS if whole else _MOST_SMALL_ROWS)
    whole = whole and large
    for tile_m, tile_n, halvings in _LARGE if large else _LARGE + _SMALL:
        tiles = -(-m // tile_m) * -(-n // tile_n)
        area = tile_m * tile_n / small_tile**halvings
        for price, sharers in enumerate(_SHARERS):
            if whole and price and tiles * sharers > sms:
                break
            turns = -(-tiles * sharers // sms) / sharers
            cost = turns * area * (1.0 + price * split_loss)
            if cost < best:
                best = cost
            if tiles * sharers >= 8 * sms:
                break  # sharing more could not save what it costs
    return best * sms / (m * n)
