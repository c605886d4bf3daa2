// From phases to output rows. Included by conv_kernel.h, once for each instruction set: no include guard.

// Lanes of a and then of b, by index.
template <class T>
inline Vector<T> permute(Vector<T> a, Vector<T> b, typename VectorOf<T>::Mask index) {
#if defined(__clang__)
  Vector<T> out;
#pragma clang loop unroll(full)
  for (int i = 0; i < kLanes<T>; ++i) out[i] = index[i] < kLanes<T> ? a[index[i]] : b[index[i] - kLanes<T>];
  return out;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Vector K of the interleaving of `Phases` vectors: element e is lane e / Phases of vector e % Phases.
template <class T, int Phases, int K>
inline Vector<T> interleaved(const Vector<T>* in) {
  constexpr int L = kLanes<T>;
  if constexpr (Phases == 1) {
    return in[0];
  } else if constexpr (Phases == 2) {
    typename VectorOf<T>::Mask index = {};
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) index[i] = (K * L + i) % 2 * L + (K * L + i) / 2;
    return permute<T>(in[0], in[1], index);
  } else if constexpr (Phases == 3) {
    typename VectorOf<T>::Mask two = {}, third = {};
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      const int phase = (K * L + i) % 3, lane = (K * L + i) / 3;
      two[i] = phase < 2 ? phase * L + lane : 0;
      third[i] = phase < 2 ? i : L + lane;
    }
    return permute<T>(permute<T>(in[0], in[1], two), in[2], third);
  } else {
    static_assert(Phases % 2 == 0, "interleaved by 1, 2, 3, 4 or 8");
    Vector<T> even[Phases / 2], odd[Phases / 2];
#pragma GCC unroll 4
    for (int i = 0; i < Phases / 2; ++i) even[i] = in[2 * i], odd[i] = in[2 * i + 1];
    const Vector<T> pair[2] = {interleaved<T, Phases / 2, K / 2>(even), interleaved<T, Phases / 2, K / 2>(odd)};
    return interleaved<T, 2, K % 2>(pair);
  }
}

inline void put(float* to, Vector<float> v, bool stream) { stream ? stream_vector(to, v) : store(to, v); }
inline void put(double* to, Vector<double> v, bool stream) { stream ? stream_vector(to, v) : store(to, v); }
inline void put(Half* to, Vector<float> v, bool) { store_half(to, v); }
// As from_accumulator() does, a vector at once.
inline void put(BFloat16* to, Vector<float> v, bool) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
  const Bits is_nan = reinterpret_cast<Bits>((bits & 0x7fffffffu) > 0x7f800000u);
  const Halves out = __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), Halves);
  __builtin_memcpy(to, &out, sizeof(out));
}

// Reads `Phases` planes side by side from output position `at` on.
template <class T, int Phases>
struct Streams {
  const T* plane[Phases];

  Streams(const T* planes, int64_t plane_stride, int64_t at) {
#pragma GCC unroll 8
    for (int k = 0; k < Phases; ++k) plane[k] = planes + (at + k) % Phases * plane_stride + (at + k) / Phases;
  }
  // The next Phases vectors of outputs.
  void next(Vector<T>* out) {
    Vector<T> in[Phases];
#pragma GCC unroll 8
    for (int k = 0; k < Phases; ++k) in[k] = load(plane[k]), plane[k] += kLanes<T>;
    fill<0>(in, out);
  }
  template <int K>
  static void fill(const Vector<T>* in, Vector<T>* out) {
    out[K] = interleaved<T, Phases, K>(in);
    if constexpr (K + 1 < Phases) fill<K + 1>(in, out);
  }
};

// Outputs [from, to) one by one.
template <class S, class T, int Phases>
inline void emit_some(S* row, const T* planes, int64_t plane_stride, int64_t from, int64_t to) {
  for (int64_t o = from; o < to; ++o) from_accumulator(planes[o % Phases * plane_stride + o / Phases], row + o);
}

// Writes outputs [from, to) of a row whose phases lie in planes: output o is element o / Phases of plane o % Phases.
// Unless it is the `last` call for the row, it may stop early; returns where.
template <class S, class T, int Phases>
int64_t emit(S* row, const T* planes, int64_t plane_stride, int64_t from, int64_t to, bool last, bool stream) {
  constexpr int64_t kStep = Phases * kLanes<T>;
  constexpr int64_t kAlign = kLanes<T> * sizeof(S);
  if (stream && from == 0) {
    const int64_t misaligned = int64_t(reinterpret_cast<uintptr_t>(row) % kAlign / sizeof(S));
    const int64_t head = misaligned == 0 ? 0 : kLanes<T> - misaligned;
    from = head < to ? head : to;
    emit_some<S, T, Phases>(row, planes, plane_stride, 0, from);
  }
  Streams<T, Phases> streams(planes, plane_stride, from);
  Vector<T> out[Phases];
  for (; from + kStep <= to; from += kStep) {
    streams.next(out);
#pragma GCC unroll 8
    for (int k = 0; k < Phases; ++k) put(row + from + k * kLanes<T>, out[k], stream);
  }
  if (!last || from == to) return from;
  if (!stream && to >= kStep) {  // the last vectors, some outputs for the second time
    from = to - kStep;
    streams = Streams<T, Phases>(planes, plane_stride, from);
  }
  streams.next(out);
#pragma GCC unroll 8
  for (int k = 0; k < Phases; ++k) {
    if (from + kLanes<T> > to) break;
    put(row + from, out[k], false);
    from += kLanes<T>;
  }
  emit_some<S, T, Phases>(row, planes, plane_stride, from, to);
  return to;
}

template <class S, class T>
int64_t emit_row(S* row, const T* planes, int64_t plane_stride, int64_t phases, int64_t from, int64_t to, bool last,
                 bool stream) {
  switch (phases) {
    case 1:
      return emit<S, T, 1>(row, planes, plane_stride, from, to, last, stream);
    case 2:
      return emit<S, T, 2>(row, planes, plane_stride, from, to, last, stream);
    case 3:
      return emit<S, T, 3>(row, planes, plane_stride, from, to, last, stream);
    case 4:
      return emit<S, T, 4>(row, planes, plane_stride, from, to, last, stream);
    default:
      return emit<S, T, 8>(row, planes, plane_stride, from, to, last, stream);
  }
}

// One phase of a row: plane[cell] becomes output cell * phases + phase, as far as there are `outputs`.
template <class S, class T>
void emit_phase(S* row, const T* plane, int64_t phases, int64_t phase, int64_t cells, int64_t outputs) {
  for (int64_t o = phase; cells > 0 && o < outputs; o += phases, --cells) from_accumulator(*plane++, row + o);
}

// A row without taps.
template <class S, class T>
void fill_row(S* row, T bias, int64_t count, bool stream) {
  constexpr int64_t kAlign = kLanes<T> * sizeof(S);
  const Vector<T> value = bias - Vector<T>{};
  S one;
  from_accumulator(bias, &one);
  int64_t i = 0;
  for (; i < count && reinterpret_cast<uintptr_t>(row + i) % kAlign != 0; ++i) row[i] = one;
  for (; i + kLanes<T> <= count; i += kLanes<T>) put(row + i, value, stream);
  for (; i < count; ++i) row[i] = one;
}
