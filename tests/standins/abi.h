// Whether two C functions are called alike: as many arguments, each as wide, pointers where pointers are.
#pragma once

#include <type_traits>

template <class A, class B>
constexpr bool kAlike = (std::is_void_v<A> && std::is_void_v<B>) ||
                        (sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                         std::is_floating_point_v<A> == std::is_floating_point_v<B>);

template <class F, class G>
struct CalledAlike : std::false_type {};

template <class R, class... A, class Q, class... B>
struct CalledAlike<R(A...), Q(B...)> {
  static constexpr bool compare() {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return kAlike<R, Q> && (kAlike<A, B> && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = compare();
};
