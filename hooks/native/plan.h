// What the arguments of an operator mean, as hooks/torch/c10d_operators.py has it, and how many bytes a call moves.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <string>

namespace commtrace {

// The forms of hooks/torch/c10d_operators.py, which explains them.
enum class Form { kNothing, kBuffers, kPair, kLists, kRooted, kAllToAll, kAllToAllSingle };

constexpr int kMostPlans = 63;
constexpr int kBatchPlan = 63;  // stands for all operators of a coalesced batch

// Positions of arguments; -1: there is none.
struct Plan {
  std::string space, name;
  int number = 0, arguments = 0;
  Form form = Form::kNothing;
  int first = -1, second = -1, third = -1;  // the arguments that the form is about
  int group_at = -1, async_at = -1, reduce_op_at = -1, peer_at = -1, tag_at = -1, output_at = 0, sample_at = 0;
  bool coalesced = false, blocking = false, message = false, send = false, barrier = false;
};

struct Size {
  int64_t payload = 0, local = 0;
  bool uneven = false;
};

using Arguments = c10::ArrayRef<c10::IValue>;

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

// The first tensor of a value; null where a list is empty.
inline const at::Tensor* first_tensor(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? &value.toTensor() : nullptr;
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

inline Size all_to_all_single(const Plan& plan, Arguments args, int size, int rank) {
  const at::Tensor& tensor = args[plan.first].toTensor();
  const auto number = [](const c10::IValue& item) { return item.toInt(); };
  const c10::IValue &sent = args[plan.second], &received = args[plan.third];
  const int64_t payload = nbytes(tensor);
  const bool uneven = differ(sent, number) || differ(received, number);
  const auto splits = sent.toListRef();
  if (splits.empty()) return {payload, payload / size, uneven};
  const int64_t rows = tensor.size(0);  // splits count rows, whatever their length
  return {payload, rows > 0 ? payload / rows * splits.at(rank).toInt() : 0, uneven};
}

inline Size measure(const Plan& plan, Arguments args, int size, int rank) {
  switch (plan.form) {
    case Form::kNothing:
      return {};
    case Form::kBuffers:
      return {total(args[plan.first]), 0, false};
    case Form::kPair:
      return {total(args[plan.first]), total(args[plan.second]), false};
    case Form::kLists:
      return {total(args[plan.first]), total(args[plan.second]), any_shares_differ(args[plan.first])};
    case Form::kRooted: {
      const int64_t own = total(args[plan.first]);
      return {size * own, own, false};
    }
    case Form::kAllToAll: {
      const auto tensors = args[plan.first].toListRef();
      const int64_t own = rank >= 0 && rank < static_cast<int>(tensors.size()) ? total(tensors[rank]) : 0;
      return {total(args[plan.first]), own, shares_differ(args[plan.first]) || shares_differ(args[plan.second])};
    }
    case Form::kAllToAllSingle:
      return all_to_all_single(plan, args, size, rank);
  }
  return {};
}

// The C++ object within a boxed one, which stays alive as long as the value does; null for a null one. (toCustomClass
// looks its type up each time, and counts; a plan is only made for operators whose schema has it.)
template <typename T>
T* unboxed(const c10::IValue& value) {
  if (!value.isObject()) return nullptr;
  auto* held = static_cast<const c10::intrusive_ptr_target*>(value.toObjectRef().getSlot(0).internalToPointer());
  return static_cast<T*>(const_cast<c10::intrusive_ptr_target*>(held));
}

}  // namespace commtrace
