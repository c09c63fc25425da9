// Which token of which request each row of a step is.

#pragma once

namespace dk {

// The rows of a request stand together, and are its last tokens so far.
struct alignas(16) StepToken {
  int request;   // -1: padding, which has 0 for the rest
  int position;  // of this row's token in its request
  int start;     // position of the token of the request's first row
  int end;       // and that behind its last row: the request's length

  static __device__ StepToken load(const int* tokens, int row) {
    return reinterpret_cast<const StepToken*>(tokens)[row];
  }
  __device__ bool is_padding() const { return request < 0; }
  // Whether the token at position `other` of this request has a row in this step: `other - position` rows behind this.
  __device__ bool has(int other) const { return start <= other && other < end; }
};

}  // namespace dk
