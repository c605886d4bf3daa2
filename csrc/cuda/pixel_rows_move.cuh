// Rows of pixels: the warp that loads and the one that stores.
#pragma once

#include "pixel_rows_params.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Loads segments of input rows.
template <class Traits>
class PixelRowsFeeder : PixelRowsRole<Traits> {
  using Role = PixelRowsRole<Traits>;
  using T = typename Traits::Element;
  using Role::lane, Role::p;

 public:
  __device__ PixelRowsFeeder(const PixelRowsParams& p, unsigned char* shared) : Role(p, shared) {}

  __device__ void run() const {
    RowsRing buffers(p.tile.buffers);
    for (int index = blockIdx.x; index < p.items; index += gridDim.x, buffers.advance()) {
      const PixelRowsItem item(p, index);
      if (!buffers.fresh) wait_at(this->empty(buffers.at), buffers.parity ^ 1);
      for (int i = 0; i < p.tile.span; ++i) {
        const int y = item.base - (p.tile.span - 1) + i;
        if (!this->has_input(y)) continue;
        const T* const row = static_cast<const T*>(p.input) + item.batch * p.in.batch + y * p.in.axis[1];
        uint32_t* const target = this->inputs(buffers.at) + i * this->input_row_words();
        if (p.granule == 16) {
          load<16>(row, item.column - Traits::kReach, target);
        } else if (p.granule == 8) {
          load<8>(row, item.column - Traits::kReach, target);
        } else if (p.granule == 4) {
          load<4>(row, item.column - Traits::kReach, target);
        } else {
          load_elements(row, item.column - Traits::kReach, target);
        }
      }
      if (p.granule == 2) {
        arrive_at(this->full(buffers.at));
      } else {
        arrive_after_copies(this->full(buffers.at));
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  __device__ bool exists(int x) const { return static_cast<unsigned>(x) < static_cast<unsigned>(p.in_width); }

  // Pixels from `first` on, in pieces.
  template <int bytes>
  __device__ void load(const T* row, int first, uint32_t* target) const {
    const int count = (p.tile.columns + Traits::kReach) * p.by_pieces.divisor;
#pragma unroll 4
    for (int i = lane; i < count; i += 32) {
      int piece = i;
      const int pixel = p.by_pieces(piece), x = first + pixel;
      const bool inside = exists(x);
      copy_or_clear_async<bytes>(target + pixel * p.tile.row_pitch + piece * (bytes / 4),
                                 row + (inside ? x : 0) * p.in.axis[2] + piece * (bytes / static_cast<int>(sizeof(T))),
                                 inside);
    }
  }

  __device__ void load_elements(const T* row, int first, uint32_t* target) const {
    const int count = (p.tile.columns + Traits::kReach) * p.by_pieces.divisor;
#pragma unroll 8
    for (int i = lane; i < count; i += 32) {
      int piece = i;
      const int pixel = p.by_pieces(piece), x = first + pixel;
      const T value = exists(x) ? __ldg(row + x * p.in.axis[2] + piece) : from_accumulator<T>(0.f);
      reinterpret_cast<T*>(target + pixel * p.tile.row_pitch)[piece] = value;
    }
  }
};

// Stores rows in pieces, one a lane.
template <class Traits>
class PixelRowsStorer : PixelRowsRole<Traits> {
  using Role = PixelRowsRole<Traits>;
  using T = typename Traits::Element;
  using Role::lane, Role::p;
  static constexpr int kVector = Traits::kVector;

 public:
  __device__ PixelRowsStorer(const PixelRowsParams& p, unsigned char* shared) : Role(p, shared) {}

  __device__ void run() const {
    RowsRing stages(p.tile.stages);
    RowsReadStages read(this->free(0));
    for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
      const PixelRowsItem item(p, index);
#pragma unroll 1
      for (int phase = 0; phase < p.height_stride; ++phase) {
        const int y = this->output_y(item.base, phase);
        if (this->tapless(phase) && this->has_output(y)) store(item, y, this->constants(), 0);
      }
      commit_bulk();
#pragma unroll 1
      for (int phase = 0; phase < p.height_stride; ++phase) {
        const int y = this->output_y(item.base, phase);
        if (this->tapless(phase) || !this->has_output(y)) continue;
        read.wait_for(this->staged(stages.at), stages.parity);
        store(item, y, this->outputs(stages.at), p.out_channels);
        read.commit(stages.at);
        stages.advance();
      }
    }
    read.finish();
  }

 private:
  // The segment of row y, from what is staged: pixels `pitch` apart, or constants.
  __device__ void store(const PixelRowsItem& item, int y, const T* staged, int pitch) const {
    const int first = item.column * Traits::kStride - p.padding;
    const int begin = max(0, first), end = min(p.out_width, first + p.tile.columns * Traits::kStride);
    T* const row = static_cast<T*>(p.output) + item.batch * p.out.batch + y * p.out.axis[1];
    for (int o = begin + lane * p.tile.constant_pixels; o < end; o += 32 * p.tile.constant_pixels) {
      store_piece(row + static_cast<int64_t>(o) * p.out_channels, staged + (o - first) * pitch,
                  min(p.tile.constant_pixels, end - o) * p.out_channels);
    }
  }

  // Both addresses are the same modulo a sector.
  __device__ void store_piece(T* target, const T* source, int count) const {
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(target) / sizeof(T)) & (kVector - 1);
    const int head = -skew & (kVector - 1), core = (count - head) / kVector * kVector;
    for (int i = 0; i < head; ++i) target[i] = source[i];
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target + head),
                 "r"(shared_address(source + head)), "r"(core * static_cast<int>(sizeof(T)))
                 : "memory");
    for (int i = head + core; i < count; ++i) target[i] = source[i];
  }
};

#endif

}  // namespace fastconvt::cuda
