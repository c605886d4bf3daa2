// Heads in one turn: outputs from the products of a box.
#pragma once

#include "device/shared_address.cuh"
#include "epilogue.cuh"
#include "heads_box_params.cuh"
#include "heads_repair.cuh"

namespace fastconvt::cuda {

// Where products are, in bytes: beyond them, in any sum, for a tap that an output does not have.
inline constexpr unsigned kHeadsBoxNowhere = 1u << 24;

// Tables of a block. Elements of a row: for two neighbouring ones the addresses of the products of two taps each. Rows:
// where their products are from there on, by the taps of the first two axes, and their outputs; -1: there is no row.
struct HeadsBoxTables {
  uint4* elements;
  uint4* products;
  int* outputs;
  float* bias;

  __device__ HeadsBoxTables(const HeadsBoxParams& p, unsigned char* shared) {
    elements = reinterpret_cast<uint4*>(shared + p.tables);
    products = elements + p.row_elements / 2;
    outputs = reinterpret_cast<int*>(products + p.row_batches * kHeadsBoxRows);
    bias = reinterpret_cast<float*>(outputs + p.row_batches * kHeadsBoxRows);
  }
};

template <int kAxis>
__device__ __forceinline__ uint2 heads_box_taps(const HeadsBoxParams& p, const HeadsBoxPlace& place, int output) {
  const HeadsBoxAxis& of = p.of[kAxis];
  int phase = place.first[kAxis] + output + of.axis.padding;
  const int base = p.by_stride[kAxis](phase);
  const HeadsBoxTaps taps = of.taps[phase];
  const int position = base + taps.offset;
  unsigned entry[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = position - j * of.axis.offset_step();
    const bool exists = output < place.outputs[kAxis] && j < taps.count && at >= 0 && at < of.axis.in;
    entry[j] =
        exists ? taps.bytes + j * of.tap_bytes + (at - place.begin[kAxis]) * of.position_bytes : kHeadsBoxNowhere;
  }
  return make_uint2(entry[0], entry[1]);
}

__device__ __forceinline__ void heads_box_make_tables(const HeadsBoxParams& p, const HeadsBoxPlace& place,
                                                      const HeadsBoxTables& tables, uint32_t products) {
#pragma unroll 1
  for (int i = threadIdx.x; i < p.row_elements; i += blockDim.x) {
    int channel = i, x = i;
    if (p.channels_last) x = p.by_channels(channel);
    uint2 entry = heads_box_taps<2>(p, place, x);
    if (p.channels_last) entry.x += channel * p.channel_bytes, entry.y += channel * p.channel_bytes;
    reinterpret_cast<uint2*>(tables.elements)[i] = make_uint2(entry.x + products, entry.y + products);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.row_batches * kHeadsBoxRows; i += blockDim.x) {
    // Rows of a phase are neighbours, since they have the same taps.
    int y = i;
    const int z = p.by_rows(y), phase = p.by_places(y);
    y = y * p.of[1].axis.stride + phase;
    const uint2 planes = heads_box_taps<0>(p, place, z), rows = heads_box_taps<1>(p, place, y);
    tables.products[i] = make_uint4(planes.x + rows.x, planes.x + rows.y, planes.y + rows.x, planes.y + rows.y);
    const bool exists = z < place.outputs[0] && y < place.outputs[1];
    tables.outputs[i] = exists ? z * static_cast<int>(p.out.axis[0]) + y * static_cast<int>(p.out.axis[1]) : -1;
  }
}

// Two neighbouring elements of a row.
template <typename T>
class HeadsBoxFold {
  const HeadsBoxParams& p;
  const HeadsBoxPlace& place;
  const HeadsBoxTables tables;
  const uint32_t zeros;  // shared memory
  T* const output;

 public:
  bool careful = false;  // whether a value was not finite

  __device__ __forceinline__ HeadsBoxFold(const HeadsBoxParams& p, const HeadsBoxPlace& place,
                                          const HeadsBoxTables& tables, const void* products)
      : p(p),
        place(place),
        tables(tables),
        zeros(shared_address(products) + p.zeros),
        output(static_cast<T*>(p.output) + place.sample * p.out.batch + place.first[0] * p.out.axis[0] +
               place.first[1] * p.out.axis[1] + place.first[2] * p.out.axis[2]) {}

  // A warp takes 64 elements of kRows rows at a time.
  __device__ __forceinline__ void run() {
    const int batches = p.row_batches * (p.row_elements / 64);
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < batches; i += blockDim.x / 32) {
      int batch = i;
      int element = p.by_batches(batch) * 64 + threadIdx.x % 32 * 2;
      const int left = place.outputs[2] * (p.channels_last ? p.out_channels : 1) - element;
      const uint4 entry = tables.elements[element / 2];
      int to[kRows];
      unsigned products[kRows][4], least[4] = {~0u, ~0u, ~0u, ~0u};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        to[r] = tables.outputs[batch * kRows + r];
        if (to[r] >= 0) to[r] += element;
        const uint4 word = tables.products[batch * kRows + r];
        products[r][0] = word.x, products[r][1] = word.y, products[r][2] = word.z, products[r][3] = word.w;
#pragma unroll
        for (int j = 0; j < 4; ++j) least[j] = min(least[j], products[r][j]);
      }
      float2 bias{};
      if (p.channels_last) {
        p.by_channels(element);
        bias = make_float2(tables.bias[element], tables.bias[element + 1 < p.out_channels ? element + 1 : 0]);
      }
      unsigned shift = 0;
#pragma unroll 1
      for (int c = 0; c < (p.channels_last ? 1 : p.out_channels); ++c, shift += p.channel_bytes) {
        if (!p.channels_last) bias.x = bias.y = tables.bias[c];
        float2 sum[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] = bias;
        const uint4 at = make_uint4(entry.x + shift, entry.y + shift, entry.z + shift, entry.w + shift);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (least[j] < kHeadsBoxNowhere) add(products, j, at, sum);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          store(output + c * p.out.channel + to[r], to[r] >= 0 ? left : 0, sum[r]);
        }
      }
    }
  }

 private:
  static constexpr int kRows = kHeadsBoxRows;

  // What does not exist is beyond the products, where a zero is.
  __device__ __forceinline__ float product(unsigned at) const {
    float value;
    asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(min(at, zeros)));
    return value;
  }

  __device__ __forceinline__ void add(const unsigned (&products)[kRows][4], int j, const uint4& at,
                                      float2 (&sum)[kRows]) const {
    float value[kRows][2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      value[r][0] = product(products[r][j] + at.x), value[r][1] = product(products[r][j] + at.z);
    }
    if (p.two_taps) {
      float second[kRows][2];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        second[r][0] = product(products[r][j] + at.y), second[r][1] = product(products[r][j] + at.w);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r].x += second[r][0], sum[r].y += second[r][1];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r].x += value[r][0], sum[r].y += value[r][1];
  }

  __device__ __forceinline__ void store(T* to, int left, const float2& sum) {
    careful = careful || !is_finite(sum.x) || !is_finite(sum.y);
    float x[2] = {sum.x, sum.y};
    p.rectify(x);
    const Pack<T, 2> pack = rounded<T>(x);
    if (p.element_pairs) {
      if (left > 0) *reinterpret_cast<Pack<T, 2>*>(to) = pack;
    } else {
      if (left > 0) to[0] = pack.value[0];
      if (left > 1) to[1] = pack.value[1];
    }
  }
};

// What heads_sum_by_definition() reads.
struct HeadsBoxDefinition {
  const void* input;
  const void* weight;
  Strides in;
  AxisParams axis[3];
  int group_in, channels, taps;
};

// Makes the outputs of the block that are not finite again, by the definition.
template <typename T>
__device__ __noinline__ void heads_box_repair(const HeadsBoxParams& p, const HeadsBoxPlace& place) {
  const HeadsBoxDefinition definition{p.input,       p.weight,       p.in,  {p.of[0].axis, p.of[1].axis, p.of[2].axis},
                                      p.in_channels, p.out_channels, p.taps};
  const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
  const int outputs = p.out_channels * place.outputs[0] * place.outputs[1] * place.outputs[2];
  for (int i = threadIdx.x; i < outputs; i += blockDim.x) {
    int rest = i, at[3];
    for (int a = 2; a >= 0; --a) {
      at[a] = place.first[a] + rest % place.outputs[a];
      rest /= place.outputs[a];
    }
    T* const to = static_cast<T*>(p.output) + place.sample * p.out.batch + rest * p.out.channel +
                  at[0] * p.out.axis[0] + at[1] * p.out.axis[1] + at[2] * p.out.axis[2];
    if (p.rectify.shows_finite(to_accumulator(*to))) continue;
    const double sum = heads_sum_by_definition<T>(definition, place.sample, 0, rest, at[0], at[1], at[2]);
    *to = from_accumulator<T>(p.rectify(static_cast<float>(sum + epilogue.channel_term(rest))));
  }
}

}  // namespace fastconvt::cuda
