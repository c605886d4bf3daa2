// What the plans of gradients in TF32 from contiguous tensors (pairs_tf32_gradients.h, boxes_tf32_gradients.h) share.
#pragma once

#include "problem.h"

namespace fastconvt {

// Tries the ways in which `processors` serve both gradients, consider(those of the input's).
template <bool kInput, bool kWeight, class Consider>
void divide_processors(int processors, const Consider& consider) {
  if (!kInput || !kWeight) {
    consider(kInput ? processors : 0);
  } else {
    for (int input = 2; input < processors; input += 2) consider(input);
  }
}

// The fastest of the plans make(tiles of eight input channels); no blocks: none can be made.
template <class Make>
auto fastest_tiles(const Problem& problem, const Make& make) {
  decltype(make(8)) best{};
  for (int tiles = 8; tiles <= 32; tiles *= 2) {
    if (tiles > 8 && problem.in_channels <= 4 * tiles) break;
    if (tiles == 16 && problem.in_channels % 256 == 0) continue;  // wider blocks are faster
    const auto t = make(tiles);
    if (t.blocks > 0 && (best.blocks == 0 || t.clocks < best.clocks)) best = t;
  }
  return best;
}

}  // namespace fastconvt
