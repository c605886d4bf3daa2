// Those of a block that do not multiply: two warps find out what its items are, one thread copies inputs, one weights.
#pragma once

#include "epilogue.cuh"
#include "phase_pixels_item.cuh"

namespace fastconvt::cuda {

// In shared memory: of every stage of weights, every buffer of inputs and every task, that it is full and that it is
// empty.
struct PhasePixelsBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kPhasePixelsMaxStages + stage); }
  __device__ __forceinline__ uint32_t loaded(int buffer) const { return full(2 * kPhasePixelsMaxStages + buffer); }
  __device__ __forceinline__ uint32_t free(int buffer) const { return loaded(kPhasePixelsMaxBuffers + buffer); }
  __device__ __forceinline__ uint32_t posted(int task) const { return loaded(2 * kPhasePixelsMaxBuffers + task); }
  __device__ __forceinline__ uint32_t done(int task) const { return posted(2 + task); }
};

// The packed weights of a warpgroup's phase: units of one tap of one chunk.
__device__ __forceinline__ const char* find_weights(const PhasePixelsParams& p, const PhasePixelsItem& item,
                                                    const PhasePixelsPhase& phase, int warpgroup) {
  const bool channels = p.split == PhaseTmaSplit::kChannels;
  const int block = channels ? 2 * item.channel_block + warpgroup : item.channel_block;
  const int blocks = channels ? 2 * p.channel_blocks.divisor : p.channel_blocks.divisor;
  const int64_t unit = ((static_cast<int64_t>(item.group) * blocks + block) * p.taps + phase.before) * p.chunks;
  return static_cast<const char*>(p.packed_weight) + unit * p.unit_bytes;
}

__device__ __forceinline__ void write_share(const PhasePixelsParams& p, const PhasePixelsItem& item,
                                            const PhasePixelsPhase& phase, const int (&start)[3], int batches,
                                            int warpgroup, PhasePixelsShare& share) {
  share.walk = find_walk(p, phase, start);
  share.count = phase.count;
  share.packed_weights = find_weights(p, item, phase, warpgroup);
  share.weights = find_weight_walk(p, phase);
  const bool exists = phase.f[2] < p.axis[2].stride;
  bool whole = batches == p.box_batch;
  int64_t place = item.first[0] * p.out.batch + int64_t{item.group} * p.group_out;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const int count = exists ? count_cells(p, item, a, phase.f[a]) : 0;
    share.counts[a] = count;
    whole = whole && count >= p.axis[a].box;
    place += (item.first[a + 1] * p.axis[a].stride + phase.f[a]) * p.out.axis[a];
  }
  share.whole = whole;
  share.place = place;
}

// Finds out what the block's items are, ahead of those who need it: every second task. A warp.
template <class Epilogue>
__device__ __forceinline__ void post_tasks(const PhasePixelsShared& shared, const Epilogue& epilogue, int place) {
  const PhasePixelsParams& p = shared.p;
  const PhasePixelsBarriers barriers{shared_address(shared.bytes)};
  PhasePixelsTask& task = shared.tasks()[place];
  const int lane = threadIdx.x % 32, warpgroup = lane % 2;
  int number = 0, parity = 1;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++number) {
    if (number % 2 != place) continue;
    const PhasePixelsItem item = find_item(p, index);
    const int batches = min(p.box_batch, p.batch - item.first[0]);
    const PhasePixelsPhase phase = find_phase(p, item, warpgroup);
    const int taps = max(phase.count, __shfl_xor_sync(~0u, phase.count, 1));
    int start[3];
    find_start(p, phase, start);
    mbarrier_wait(barriers.done(place), parity);
    parity ^= 1;
    float* const terms = shared.terms(place);
    for (int i = lane; i < p.columns; i += 32) {
      const int channel = item.channel_block * p.columns + i;
      terms[i] = channel < p.group_out && p.bias != nullptr
                     ? epilogue.channel_term(static_cast<int64_t>(item.group) * p.group_out + channel)
                     : 0.f;
    }
    if (lane == 0) {
      const int n = item.first[0], w = item.first[3] + start[2];
      task.group = item.group;
      task.channel_block = item.channel_block;
      task.taps = taps;
      task.batches = batches;
      task.at[0] = item.group * p.group_channels;
      task.at[1] = p.batch_inner ? n : w;
      task.at[2] = p.batch_inner ? w : n;
      task.at[3] = item.first[2] + start[1];
      task.at[4] = item.first[1] + start[0];
    }
    if (lane < 2) write_share(p, item, phase, start, batches, warpgroup, task.share[warpgroup]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.posted(place));
  }
  if (number % 2 != place) return;
  mbarrier_wait(barriers.done(place), parity);
  if (lane == 0) {
    task.group = -1;
    mbarrier_arrive(barriers.posted(place));
  }
}

// Copies the boxes of inputs that all tasks need, each as soon as its place is free. One thread.
__device__ __forceinline__ void copy_inputs(const PhasePixelsShared& shared, const CUtensorMap* map) {
  const PhasePixelsParams& p = shared.p;
  const uint32_t base = shared_address(shared.bytes);
  const PhasePixelsBarriers barriers{base};
  wait_for_previous_grid();  // for packed tensors
  BarrierRing ring, buffers;
  for (;; ring.advance(2)) {
    mbarrier_wait(barriers.posted(ring.place), ring.parity);
    const PhasePixelsTask& task = shared.tasks()[ring.place];
    if (task.group < 0) break;
    const int chunks = task.taps > 0 ? p.chunks : 0;
    int at[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) at[i] = task.at[i];
    mbarrier_arrive(barriers.done(ring.place));
    for (int chunk = 0; chunk < chunks; ++chunk, buffers.advance(p.buffers)) {
      const uint32_t loaded = barriers.loaded(buffers.place);
      mbarrier_wait(barriers.free(buffers.place), buffers.parity ^ 1);
      mbarrier_arrive_expecting(loaded, p.copied_bytes);
      load_box(base + p.inputs_at + buffers.place * p.buffer_bytes, map, at, loaded);
      at[0] += p.chunk;
    }
  }
}

// The same for weights: stages of some taps of a chunk of input channels for either warpgroup. Packed ones lie as
// stages have them. Of others, a copy brings 64 output channels of one tap or, where taps are neighbours, of a stage's.
template <bool kPacked>
__device__ __forceinline__ void copy_weights(const PhasePixelsShared& shared, const CUtensorMap* map) {
  const PhasePixelsParams& p = shared.p;
  const uint32_t base = shared_address(shared.bytes);
  const PhasePixelsBarriers barriers{base};
  const bool shares = p.split != PhaseTmaSplit::kCells;  // both warpgroups have weights of their own
  const int odd_column = p.split == PhaseTmaSplit::kChannels ? p.unit_columns : 0;
  const int stage_taps = p.taps_per_stage, copied = kPacked ? 1 : p.copied_taps;
  wait_for_previous_grid();  // for packed tensors
  BarrierRing ring, stages;
  for (;; ring.advance(2)) {
    mbarrier_wait(barriers.posted(ring.place), ring.parity);
    const PhasePixelsTask& task = shared.tasks()[ring.place];
    if (task.group < 0) break;
    const int taps = task.taps, even = task.share[0].count, odd = shares ? task.share[1].count : 0;
    const int chunks = taps > 0 ? p.chunks : 0, column = task.channel_block * p.columns;
    const PhasePixelsWalk walks[2] = {task.share[0].weights, task.share[1].weights};
    const char* packed[2] = {task.share[0].packed_weights, task.share[1].packed_weights};
    int at[4] = {column, 0, 0, task.group};  // channel, input channel, tap, group
    mbarrier_arrive(barriers.done(ring.place));
    for (int chunk = 0; chunk < chunks; ++chunk, at[1] += p.chunk) {
      PhasePixelsTap now[2] = {{walks[0].offset, 0, 0}, {walks[1].offset, 0, 0}};
      for (int tap = 0; tap < taps; tap += stage_taps, stages.advance(p.stages)) {
        const uint32_t full = barriers.full(stages.place);
        uint32_t to = base + p.weights_at + stages.place * p.stage_bytes;
        const int left[2] = {min(stage_taps, even - tap), min(stage_taps, odd - tap)};
        int expected = 0;
#pragma unroll
        for (int u = 0; u < 2; ++u) expected += left[u] > 0 ? (copied > 1 ? copied : left[u]) * p.unit_bytes : 0;
        mbarrier_wait(barriers.empty(stages.place), stages.parity ^ 1);
        mbarrier_arrive_expecting(full, expected);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          if constexpr (kPacked) {
            const int bytes = max(left[u], 0) * p.unit_bytes;
            if (bytes > 0) bulk_load(to, packed[u], bytes, full);
            packed[u] += bytes;
          } else {
            for (int i = 0; i < left[u]; i += copied) {
              at[2] = now[u].offset;
              for (int c = 0; c < p.unit_columns; c += 64) {
                at[0] = column + c + u * odd_column;
                load_box(to + c / 64 * p.weight_block_bytes + i * p.weight_tap_bytes, map, at, full);
              }
              for (int k = 0; k < copied; ++k) now[u].advance(walks[u]);
            }
          }
          to += stage_taps * p.unit_bytes;
        }
      }
    }
  }
}

}  // namespace fastconvt::cuda
