// What the kernels of the gradients by pairs know of their problem.
#pragma once

#include "../core/pairs_gradient.h"
#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

struct PairsGradientParams {
  // Units: neighbouring positions of a row of the input, whose outputs are copied at once.
  int unit, units;
  int input_unit;                       // the same of inputs
  FastDivide row_units, height, depth;  // of a row; of the input
  int width;                            // of the input
  int lead_mask;                        // what a row of images begins beyond a whole vector; 0: rows are vectors
  int step[2], padding[2];              // of the height and the depth
  int in_channels, inner;               // inner: of a row of the weight
  int stages, stage_bytes;
  int pitch, unit_bytes;         // of a staged unit of outputs: from row to row, and in all
  int margin;                    // outputs that are copied before a unit's own
  int channels_of_box;           // of outputs, that a unit's copy brings
  FastDivide column_blocks;      // of the input's gradient: of items
  int items, chunks;             // chunks: stages of an item
  FastDivide row_blocks, kinds;  // of the weight's
  int steps, splits;
  int64_t part;  // of a split, in elements
  int lent;      // parts in the memory of the input's gradient; the others follow in `partial`
  float *lent_partial, *partial;
  float* bias_partial;  // (splits, inner); may be null
  AxisParams axis[3];
  Strides in, out;
  int64_t batch;
  int out_channels;
  const void* grad_output;
  const void* input;
  const void* weight;
  void* grad_input;
  void* grad_weight;
  void* grad_bias;

  FASTCONVT_HOST_DEVICE float* part_of(int split) const {
    return split < lent ? lent_partial + split * part : partial + (split - lent) * part;
  }
};

// The positions of a unit: from x on, in a row of a batch entry.
struct PairsUnit {
  int x, y, z, n;
};

FASTCONVT_HOST_DEVICE PairsUnit find_pairs_unit(const PairsGradientParams& p, int unit) {
  PairsUnit u;
  int row = p.row_units(unit);
  u.x = unit * p.unit;
  int plane = p.height(row);
  u.y = row;
  u.n = p.depth(plane);
  u.z = plane;
  u.x -= ((u.z * p.height.divisor + u.y) * p.width) & p.lead_mask;
  return u;
}

}  // namespace fastconvt::cuda
