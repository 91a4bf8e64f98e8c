// Order of the tiles of a grouped GEMM. Every block computes it from the counts, which may be on the device.
#pragma once

#include "layout.h"

namespace moe_comm {
namespace gemm {

// Visits the tiles first, first + step, ... of all experts, in order of expert. Within an expert, `group` rows of tiles
// are visited column by column, so that blocks that run at the same time read the same rows and weights. The rows of an
// expert follow those of the one before it, or each expert has room for `room` rows.
class Walk {
 public:
  MOE_HD Walk(const int64_t* counts, int experts, int tile_rows, int tiles_n, int group, int first, int step,
              int64_t room = 0)
      : counts_(counts),
        experts_(experts),
        tile_rows_(tile_rows),
        tiles_n_(tiles_n),
        group_(group),
        step_(step),
        room_(room),
        skip_(first) {}

  int expert = -1;
  int n = 0;              // column of the tile, in tiles
  int64_t first_row = 0;  // of the tile, in the rows of all experts
  int rows = 0;           // of the tile that are the expert's, 1 to tile_rows

  MOE_HD bool next() {
    while (skip_ >= tiles_) {
      skip_ -= tiles_;
      if (expert >= 0) start_ += room_ > 0 ? room_ : count_;
      if (++expert >= experts_) return false;
      count_ = counts_[expert];
      tiles_m_ = static_cast<int>((count_ + tile_rows_ - 1) / tile_rows_);
      tiles_ = tiles_m_ * tiles_n_;
    }
    const int band = skip_ / (group_ * tiles_n_) * group_, index = skip_ - band * tiles_n_;
    const int height = tiles_m_ - band < group_ ? tiles_m_ - band : group_;
    n = index / height;
    const int64_t below = static_cast<int64_t>(band + index - n * height) * tile_rows_;
    first_row = start_ + below;
    rows = static_cast<int>(count_ - below < tile_rows_ ? count_ - below : tile_rows_);
    skip_ += step_;
    return true;
  }

 private:
  const int64_t* const counts_;
  const int experts_, tile_rows_, tiles_n_, group_, step_;
  const int64_t room_;
  int skip_, tiles_m_ = 0, tiles_ = 0;
  int64_t start_ = 0, count_ = 0;
};

}  // namespace gemm
}  // namespace moe_comm
