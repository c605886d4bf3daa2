// The register tiles of the convolution. Included by conv_kernel.h, once for each instruction set: no include guard.

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Mask __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::Type;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T>
inline Vector<T> load(const T* from) {
  Vector<T> v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
template <class T>
inline void store(T* to, Vector<T> v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

// What a tile reads: for each outer tap (depth, height) a row of every input channel, and for each tap of the phase a
// shift along it.
template <class T>
struct TileInput {
  const T* const* rows;
  const T* const* weights;  // of the channel block, at each outer tap
  int64_t outer_taps;
  const Tap* taps;
  int64_t num_taps;
  int64_t channels;  // of this call
  int64_t x_offset;  // of its first channel
  int64_t w_offset;
  int64_t channel_stride;
  int64_t tap_stride;  // elements of the weights from one tap to the next
};

// Products are summed in runs of about so many, and then the sums of the runs: rounding errors grow with the length of
// a run plus the number of runs, not with their product.
constexpr int64_t kRun = 256;

// Adds the sums of a run to what out holds, or to the start, if there is one, and clears them.
template <class T, int Block, int Vectors>
inline void finish_run(Vector<T> (&sum)[Block][Vectors], const T* start, T* out, int64_t out_stride) {
#pragma GCC unroll 16
  for (int m = 0; m < Block; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      T* o = out + m * out_stride + v * kLanes<T>;
      store(o, sum[m][v] + (start == nullptr ? load(o) : start[m] - Vector<T>{}));
      sum[m][v] = Vector<T>{};
    }
  }
}

// out[m * out_stride + lane] = start[m] + sum of the products, for `Block` output channels and `Vectors` vectors of
// cells from `column` on. Without a start, what out holds takes its place.
template <class T, int Block, int Vectors>
void tile(const TileInput<T>& input, const T* start, int64_t column, T* out, int64_t out_stride) {
  Vector<T> sum[Block][Vectors] = {};
  int64_t left = kRun;
  for (int64_t u = 0; u < input.outer_taps; ++u) {
    for (int64_t t = 0; t < input.num_taps; ++t) {
      if (left <= 0) {
        finish_run(sum, start, out, out_stride);
        start = nullptr;
        left = kRun;
      }
      left -= input.channels;
      const T* x = input.rows[u] + input.taps[t].shift + input.x_offset + column;
      const T* w = input.weights[u] + input.taps[t].index * input.tap_stride + input.w_offset;
      for (int64_t c = 0; c < input.channels; ++c, x += input.channel_stride, w += Block) {
        Vector<T> lane[Vectors];
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) lane[v] = load(x + v * kLanes<T>);
#pragma GCC unroll 16
        for (int m = 0; m < Block; ++m) {
#pragma GCC unroll 16
          for (int v = 0; v < Vectors; ++v) sum[m][v] += lane[v] * w[m];
        }
      }
    }
  }
  finish_run(sum, start, out, out_stride);
}

template <class T>
using TileFn = void (*)(const TileInput<T>&, const T*, int64_t, T*, int64_t);

// The most vectors that a tile of this many channels can hold: sums, inputs and one weight in registers.
constexpr int max_vectors(int block) {
  int vectors = 1;
  const int most = block == 1 ? 8 : block == 2 ? 6 : 4;
  while (vectors < most && block * (vectors + 1) + vectors + 1 + 1 <= kRegisters) ++vectors;
  return vectors;
}

template <class T, int Block, int Vectors = 1>
TileFn<T> tile_of_block(int vectors) {
  if constexpr (Vectors < max_vectors(Block)) {
    if (vectors > Vectors) return tile_of_block<T, Block, Vectors + 1>(vectors);
  }
  return tile<T, Block, Vectors>;
}

template <class T, int Block = 1>
TileFn<T> tile_function(int64_t block, int vectors) {
  if constexpr (Block < kMaxBlock) {
    if (block > Block) return tile_function<T, Block + 1>(block, vectors);
  }
  return tile_of_block<T, Block>(vectors);
}
