// The persistent row family: the warps that store.
#pragma once

#include "rows_persistent_role.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The warps that store. Lane c has channel c; in filling up rows, lane c + 16 its other end.
template <class Traits>
class RowsPersistentStorer : RowsPersistentRole<Traits> {
  using Role = RowsPersistentRole<Traits>;
  using T = typename Traits::Element;
  using Item = RowsPersistentItem<T>;
  using Vector = Pack<T, Traits::kVector>;
  using Role::lane, Role::p, Role::terms;
  static constexpr int kVector = Traits::kVector;
  static constexpr int kSector = Traits::kSector;
  static constexpr int kLine = Traits::kLine;

  const int channel;
  T* lane_output;  // of the lane's channel: row 0, phase 0 of the item's first base of the last axis

  // Outputs of one channel of a row, counted from phase 0 of the segment's first base, its origin: [begin, end) are
  // stored, of these [core_begin, core_end) in whole vectors. The row's own are [own_begin, own_end).
  struct Range {
    T* origin;
    int begin, core_begin, core_end, end;
    int own_begin, own_end;
  };

 public:
  __device__ RowsPersistentStorer(const RowsPersistentParams& p, unsigned char* shared)
      : Role(p, shared), channel(threadIdx.x % kRowsMmaChannels), lane_output(nullptr) {}

  __device__ void run(int storer) {
    int staged_block = -1;
    int team = 0, slot = 0;
    for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
      const Item item(p, index);
      if (item.block != staged_block) {
        wait_for_copies();
        this->sync_roles();
        this->sync_roles();
        staged_block = item.block;
      }
      lane_output = this->row_origin(item, 0, channel);
      if (storer == 0 && item.first && p.before) store_base_constants(item, item.base - 1);
      if (storer == 0 && item.last && p.after) store_base_constants(item, item.base + item.count);
      for (int i = 0; i < item.count; ++i) {
        store_base(item, item.base + i, team, slot, (storer + team) % kRowsPersistentStorers);
        if (++team == p.tile.teams) team = 0, slot += p.tile.rows;
      }
    }
    wait_for_copies();
  }

 private:
  __device__ bool stores(const Item& item) const { return lane < item.channels; }

  // Waits until all copies have read what they store.
  static __device__ void wait_for_copies() {
    commit_bulk();
    wait_for_bulk_reads();
    __syncwarp();
  }

  __device__ void store_base_constants(const Item& item, int base) const {
    for (int phase = 0; phase < p.height_stride; ++phase) {
      const int y = this->output_y(base, phase);
      if (this->tapless(phase) && this->has_output(y)) store_constants(item, y, phase);
    }
  }

  // The storer's rows of a base, those of the team's stage `own`, and the base's constants if the first row is the
  // storer's. A stage has one storer: of two, the faster could get to it two rounds ahead of the other, and barriers
  // tell two rounds apart, not three.
  __device__ void store_base(const Item& item, int base, int team, int slot, int own) const {
    const auto is_own = [own](int slot) { return slot % kRowsPersistentStages == own; };
    if (is_own(slot)) {
      store_base_constants(item, base);
    } else if (p.tile.rows == 1) {
      return;
    }
    for (int phase = 0; phase < p.height_stride; ++phase) {
      if (this->tapless(phase)) continue;
      if (is_own(slot)) store_row(item, base, phase, this->stage_of(team, slot));
      ++slot;
    }
  }

  __device__ void store_row(const Item& item, int base, int phase, const typename Role::Stage& stage) const {
    const int y = this->output_y(base, phase);
    stage.wait_until_free();
    if (this->has_output(y)) {
      const Range range = row_range(item, y, phase, false);
      fill_ends(range, stage.outputs);
      fence_shared_writes();
      wait_at(stage.staged, stage.round % 2);
      __syncwarp();
      store_staged(item, range, stage.outputs);
    } else {
      wait_at(stage.staged, stage.round % 2);
    }
    wait_for_copies();
    if (lane == 0) arrive_at(stage.free);
  }

  __device__ void store_staged(const Item& item, const Range& range, T* stage) const {
    T* const staged = this->staged_channel(stage, range.origin, channel);
    if (stores(item) && range.core_begin < range.core_end) {
      copy(range.origin + range.core_begin, staged + range.core_begin, range.core_end - range.core_begin);
    }
    store_ends(item, range, [&](int i) { return staged[i]; });
  }

  __device__ void store_constants(const Item& item, int y, int phase) const {
    const Range range = row_range(item, y, phase, true);
    if (stores(item)) {
      const int pitch = p.tile.constant_bytes / static_cast<int>(sizeof(T)), piece = pitch - kSector;
      const T* const source = this->constants + (p.bias == nullptr ? 0 : channel * pitch) +
                              misalignment(range.origin + range.core_begin, kSector);
#pragma unroll 1
      for (int i = range.core_begin; i < range.core_end; i += piece) {
        copy(range.origin + i, source, min(piece, range.core_end - i));
      }
    }
    store_ends(item, range, [&](int) { return from_accumulator<T>(p.rectify(terms[channel])); });
  }

  // What is stored of a row in the lane's channel. Where a row of constants and another one meet, the boundary moves to
  // the end of a line: constants give way, other rows are filled up.
  __device__ Range row_range(const Item& item, int y, int phase, bool constant) const {
    const int first = this->first_output(item);
    Range range;
    range.origin = lane_output + y * p.out.axis[1];
    range.own_begin = range.begin = max(0, -first);
    range.own_end = range.end = min(p.tile.columns * Traits::kStride, p.out_width - first);
    const bool joined_before = p.phase[phase].joined_before && first + range.begin == 0 && y > 0;
    const bool joined_after = p.phase[phase].joined_after && first + range.end == p.out_width && y + 1 < p.out_height;
    const T* const begin = range.origin + range.begin;
    const T* const end = range.origin + range.end;
    const int before = joined_before ? kLine : kVector, after = joined_after ? kLine : kVector;
    range.core_begin = range.begin + (-misalignment(begin, before) & (before - 1));
    range.core_end = range.end - misalignment(end, after);
    if (joined_before) {
      if (!constant) range.core_begin = range.begin - misalignment(begin, kLine);
      range.begin = range.core_begin;
    }
    if (joined_after) {
      if (!constant) range.core_end = range.end + (-misalignment(end, kLine) & (kLine - 1));
      range.end = range.core_end;
    }
    if (range.core_begin > range.core_end) range.core_begin = range.core_end = range.end;
    return range;
  }

  // The constants at the ends of a joined row.
  __device__ void fill_ends(const Range& range, T* stage) const {
    T* const staged = this->staged_channel(stage, range.origin, channel);
    Vector constant;
#pragma unroll
    for (int i = 0; i < kVector; ++i) constant.value[i] = from_accumulator<T>(p.rectify(terms[channel]));
    const bool tail = lane >= kRowsMmaChannels;
    // Before the row's own outputs whole vectors come first, after them single elements do.
    const int begin = tail ? range.own_end : range.core_begin, end = tail ? range.core_end : range.own_begin;
    const int count = end - begin, singles = max(0, count) % kVector;
    const int first_single = tail ? begin : end - singles, first_vector = tail ? begin + singles : begin;
#pragma unroll
    for (int i = 0; i < kVector - 1; ++i) {
      if (i < singles) staged[first_single + i] = constant.value[0];
    }
#pragma unroll
    for (int i = 0; i < kLine / kVector; ++i) {
      if ((i + 1) * kVector <= count) *reinterpret_cast<Vector*>(staged + first_vector + i * kVector) = constant;
    }
  }

  // What a core leaves out at the ends, element by element.
  template <class Value>
  __device__ void store_ends(const Item& item, const Range& range, Value&& value) const {
    if (channel >= item.channels) return;
    const bool tail = lane >= kRowsMmaChannels;
    const int end = tail ? range.end : range.core_begin;
#pragma unroll 1
    for (int i = tail ? range.core_end : range.begin; i < end; ++i) range.origin[i] = value(i);
  }

  static __device__ void copy(T* target, const T* source, int count) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(shared_address(source)), "r"(count * static_cast<int>(sizeof(T)))
                 : "memory");
  }
};

#endif

}  // namespace fastconvt::cuda
