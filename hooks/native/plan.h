// The arguments of an operator, as hooks/torch/c10d_operators.py describes them, and the bytes that a call moves.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <array>
#include <map>
#include <string>

namespace commtrace {

using Arguments = c10::ArrayRef<c10::IValue>;

struct Size {
  int64_t payload = 0, local = 0;
  bool uneven = false;
};

constexpr int kMostPlans = 63;
constexpr int kBatchPlan = 63;  // all operators of a coalesced batch

// Positions of arguments; -1: the operator has no such argument.
struct Plan {
  using Measure = Size (*)(const Plan&, Arguments, int group_size, int rank);

  std::string name;
  int number = 0, arguments = 0;
  Measure measure = nullptr;
  std::array<int, 3> about{-1, -1, -1};  // arguments that `measure` reads
  int group_at = -1, async_at = -1, reduce_op_at = -1, peer_at = -1, tag_at = -1, output_at = 0, sample_at = 0;
  bool coalesced = false, blocking = false, message = false, send = false, barrier = false, all_reduce = false;
};

inline int64_t nbytes(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  if (tensor.layout() == at::kSparse) return nbytes(tensor._indices()) + nbytes(tensor._values());
  return tensor.numel() * static_cast<int64_t>(tensor.itemsize());
}

inline int64_t total(const c10::IValue& value) {
  if (value.isTensor()) return nbytes(value.toTensor());
  int64_t sum = 0;
  for (const c10::IValue& item : value.toListRef()) sum += total(item);
  return sum;
}

// The first tensor of a value; null if there is none.
inline const at::Tensor* first_tensor(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? &value.toTensor() : nullptr;
  if (!value.isList()) return nullptr;
  for (const c10::IValue& item : value.toListRef())
    if (const at::Tensor* tensor = first_tensor(item)) return tensor;
  return nullptr;
}

inline bool differ(const c10::IValue& list, int64_t (*of)(const c10::IValue&)) {
  const auto items = list.toListRef();
  for (const c10::IValue& item : items)
    if (of(item) != of(items.front())) return true;
  return false;
}

inline bool shares_differ(const c10::IValue& list) {
  return differ(list, [](const c10::IValue& item) { return item.toTensor().numel(); });
}

inline bool any_shares_differ(const c10::IValue& lists) {
  for (const c10::IValue& list : lists.toListRef())
    if (shares_differ(list)) return true;
  return false;
}

inline Size all_to_all(const Plan& plan, Arguments args, int, int rank) {
  const c10::IValue &sent = args[plan.about[0]], &received = args[plan.about[1]];
  const auto tensors = sent.toListRef();
  const int64_t own = rank >= 0 && rank < static_cast<int>(tensors.size()) ? total(tensors[rank]) : 0;
  return {total(sent), own, shares_differ(sent) || shares_differ(received)};
}

inline Size all_to_all_single(const Plan& plan, Arguments args, int group_size, int rank) {
  const at::Tensor& tensor = args[plan.about[0]].toTensor();
  const auto number = [](const c10::IValue& item) { return item.toInt(); };
  const c10::IValue &sent = args[plan.about[1]], &received = args[plan.about[2]];
  const int64_t payload = nbytes(tensor);
  const bool uneven = differ(sent, number) || differ(received, number);
  const auto splits = sent.toListRef();
  if (splits.empty()) return {payload, payload / group_size, uneven};
  const int64_t rows = tensor.size(0);  // splits count rows, whatever their length
  return {payload, rows > 0 ? payload / rows * splits.at(rank).toInt() : 0, uneven};
}

// Functions that measure a call, by the kind of its Form in hooks/torch/c10d_operators.py.
inline const std::map<std::string, Plan::Measure> kForms{
    {"unknown",
     [](const Plan& plan, Arguments, int, int) -> Size {
       throw std::runtime_error("this version of commtrace does not support c10d::" + plan.name + "; update commtrace");
     }},
    {"nothing", [](const Plan&, Arguments, int, int) { return Size{}; }},
    {"buffers", [](const Plan& plan, Arguments args, int, int) { return Size{total(args[plan.about[0]])}; }},
    {"pair",
     [](const Plan& plan, Arguments args, int, int) {
       return Size{total(args[plan.about[0]]), total(args[plan.about[1]])};
     }},
    {"lists",
     [](const Plan& plan, Arguments args, int, int) {
       const c10::IValue& lists = args[plan.about[0]];
       return Size{total(lists), total(args[plan.about[1]]), any_shares_differ(lists)};
     }},
    {"rooted",
     [](const Plan& plan, Arguments args, int group_size, int) {
       const int64_t own = total(args[plan.about[0]]);
       return Size{group_size * own, own};
     }},
    {"all_to_all", all_to_all},
    {"all_to_all_single", all_to_all_single},
};

// The C++ object in a boxed value, valid as long as the value; null if the value is null. (toCustomClass would look the
// type up each time and change the reference count. Plans exist only for operators whose schema has the type.)
template <typename T>
T* unboxed(const c10::IValue& value) {
  if (!value.isObject()) return nullptr;
  auto* held = static_cast<const c10::intrusive_ptr_target*>(value.toObjectRef().slots().front().internalToPointer());
  return static_cast<T*>(const_cast<c10::intrusive_ptr_target*>(held));
}

}  // namespace commtrace
