// The persistent row family: what the warps that multiply and those that store share.
#pragma once

#include "epilogue.cuh"
#include "rows_persistent_async.cuh"
#include "rows_persistent_fragment.cuh"
#include "rows_persistent_params.cuh"

namespace fastconvt::cuda {

// What stays in shared memory for a channel block: the weights as the lanes need them, [height tap][step][tap of the
// last axis][TF32 term][lane]; the bias, and what rows of it alone are copied from: a piece a channel, or one of zeros.
template <class Traits>
__device__ void stage_channels(const RowsPersistentParams& p, int block, MmaLeft<typename Traits::Element>* weights,
                               float* terms, typename Traits::Element* constants, int thread, int threads) {
  using T = typename Traits::Element;
  const int group = p.by_channel_blocks(block), first = block * kRowsMmaChannels;
  const int taps = p.height_kernel * Traits::kKernel;
  const T* const weight =
      static_cast<const T*>(p.weight) + static_cast<int64_t>(group) * p.in_channels * p.group_out * taps;
  for (int i = thread; i < taps * p.tile.steps * 32; i += threads) {
    const int row = i / 32 / Traits::kKernel, height_tap = row / p.tile.steps;
    const int tap = height_tap * Traits::kKernel + i / 32 % Traits::kKernel;
    const int step = row - height_tap * p.tile.steps;
    // Without a branch, which would wait for what it loads.
    const auto load = [&](int mma_row, int in) {
      in += step * kRowsMmaStep;
      int out = first + mma_row, in_of_group = in;
      bool exists = out < p.out_channels && in < p.in_channels;
      exists = p.by_group_out(out) == p.by_group_in(in_of_group) && exists;
      const int64_t offset = (static_cast<int64_t>(in) * p.group_out + out) * taps + tap;
      const T value = __ldg(weight + (exists ? offset : 0));
      return exists ? value : from_accumulator<T>(0.f);
    };
    if constexpr (Traits::kSplit) {
      MmaLeft<T>* const both = weights + i / 32 * 64 + i % 32;
      make_split_left(i % 32 / 4, i % 4, load, both[0], both[32]);
    } else {
      weights[i] = make_left<T>(i % 32 / 4, i % 4, load);
    }
  }
  const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
  const auto term = [&](int c) {
    return first + c < p.out_channels ? epilogue.channel_term(group * p.out_channels + first + c) : 0.f;
  };
  if (thread < kRowsMmaChannels) terms[thread] = term(thread);
  using Vector = Pack<T, Traits::kVector>;
  const int piece = p.tile.constant_bytes / 16, pieces = p.bias == nullptr ? 1 : kRowsMmaChannels;
  for (int c = thread / 32; c < pieces; c += threads / 32) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < Traits::kVector; ++i) vector.value[i] = from_accumulator<T>(p.rectify(term(c)));
    for (int i = thread % 32; i < piece; i += 32) reinterpret_cast<Vector*>(constants)[c * piece + i] = vector;
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the roles have in common: a block's bases of the height are dealt to them in turn, and a base's rows
// pass from its team to its storer through the team's stages, of which a row that does not exist takes one as well.
template <class Traits>
struct RowsPersistentRole {
  using T = typename Traits::Element;
  using Item = RowsPersistentItem<T>;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kVector = Traits::kVector;
  static constexpr int kSector = Traits::kSector;
  static constexpr int kLine = Traits::kLine;

  const RowsPersistentParams& p;
  float* const terms;  // the bias
  MmaLeft<T>* const weights;
  T* const inputs;
  T* const outputs;
  T* const constants;
  uint64_t* const barriers;
  const int lane;

  __device__ RowsPersistentRole(const RowsPersistentParams& p, unsigned char* shared)
      : p(p),
        terms(reinterpret_cast<float*>(shared)),
        weights(reinterpret_cast<MmaLeft<T>*>(shared + kRowsMmaChannels * sizeof(float))),
        inputs(reinterpret_cast<T*>(shared + p.tile.inputs)),
        outputs(reinterpret_cast<T*>(shared + p.tile.outputs)),
        constants(reinterpret_cast<T*>(shared + p.tile.constants)),
        barriers(reinterpret_cast<uint64_t*>(shared + p.tile.barriers)),
        lane(threadIdx.x % 32) {}

  // Where the rows of a team are on their way, one after the other.
  struct Stage {
    T* outputs;
    uint64_t* staged;  // by the makers
    uint64_t* free;    // by the storer, of the round before
    int round;         // times that the stage has been in use

    __device__ void wait_until_free() const {
      if (round > 0) wait_at(free, (round - 1) % 2);
    }
  };

  // For the row number `slot` of a team.
  __device__ Stage stage_of(int team, int slot) const {
    const int index = team * kRowsPersistentStages + slot % kRowsPersistentStages;
    uint64_t* const staged = barriers + 2 * kRowsPersistentBuffers + index;
    return {outputs + index * kRowsMmaChannels * p.tile.output_pitch, staged,
            staged + kRowsPersistentStages * p.tile.teams, slot / kRowsPersistentStages};
  }

  // Where a block's chunk number k is staged.
  struct Chunk {
    T* inputs;
    Item* item;
    uint64_t* full;
    uint64_t* empty;
    int parity;  // of the times that the buffer has been in use
  };

  __device__ Chunk chunk_of(int k) const {
    const int buffer = k & ((1 << p.tile.buffer_bits) - 1);
    uint64_t* const end = barriers + 2 * kRowsPersistentBuffers + 2 * kRowsPersistentStages * p.tile.teams;
    return {inputs + buffer * (p.tile.input_bytes / static_cast<int>(sizeof(T))), reinterpret_cast<Item*>(end) + buffer,
            barriers + buffer, barriers + kRowsPersistentBuffers + buffer, k >> p.tile.buffer_bits & 1};
  }
  __device__ int makers() const { return 32 * p.tile.team_warps * p.tile.teams; }
  // All makers and storers.
  __device__ void sync_roles() const { sync_named(1, makers() + 32 * kRowsPersistentStorers); }

  __device__ bool tapless(int phase) const { return p.phase[phase].first_tap < 0; }
  __device__ int first_output(const Item& item) const { return item.column * kStride - p.padding; }
  __device__ int output_y(int base, int phase) const { return base * p.height_stride + phase - p.height_padding; }
  __device__ bool has_output(int y) const { return static_cast<unsigned>(y) < static_cast<unsigned>(p.out_height); }

  __device__ T* row_origin(const Item& item, int y, int channel) const {
    return item.output + channel * p.out.channel + y * p.out.axis[1] + first_output(item);
  }
  // Where position 0 of a channel is staged: sectors of memory are sectors of shared memory.
  __device__ T* staged_channel(T* stage, const T* origin, int channel) const {
    return stage + channel * p.tile.output_pitch + kLine + misalignment(origin, kSector);
  }
};

#endif

}  // namespace fastconvt::cuda
