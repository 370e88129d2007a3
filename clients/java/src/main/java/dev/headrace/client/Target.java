package dev.headrace.client;

import java.net.Inet6Address;
import java.net.InetAddress;
import java.net.UnknownHostException;
import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import java.util.regex.Pattern;

/**
 * What a part of a target names: one server's address, or a name each of whose addresses is a
 * server.
 *
 * @param address {@code host:port} or {@code unix:/path}; empty: a name
 * @param host the name's; else empty
 * @param port the name's; else empty
 */
record Target(String address, String host, String port) {
  private static final String DEFAULT_PORT = "50051";
  private static final Pattern HOST_ONLY = Pattern.compile("[^:\\[\\]]+|\\[[0-9A-Fa-f:.%]+\\]");
  private static final Pattern HOST_AND_PORT =
      Pattern.compile("([^:\\[\\]]+|\\[[0-9A-Fa-f:.%]+\\]):([0-9]{1,5})");
  private static final List<String> URLS = List.of("http://", "https://", "grpc://", "grpcs://");
  private static final String FORMS = "use host:port, dns:///host:port or unix:/path";

  /**
   * Where one server is.
   *
   * @param target what it is called: {@code host:port}, {@code unix:/path}, {@code ipv4:…}, {@code
   *     ipv6:…}
   * @param serverName the name on its certificate, where the address is what a name resolved to;
   *     else empty
   */
  record Address(String target, String serverName) {
    /** The address as gRPC for Java takes it, which has no ipv4: and ipv6:. */
    String dialTarget() {
      if (target.startsWith("unix:")) {
        return target;
      }
      return "dns:///" + withoutScheme(target);
    }
  }

  private static String withoutScheme(String address) {
    return address.startsWith("ipv4:") || address.startsWith("ipv6:")
        ? address.substring(5)
        : address;
  }

  /** Reads targets, each of them addresses and names with commas between them; each place once. */
  static List<Target> parse(List<String> targets) {
    Set<Target> places = new LinkedHashSet<>();
    for (String text : String.join(",", targets).split(",", -1)) {
      places.add(parse(text.strip()));
    }
    return List.copyOf(places);
  }

  private static Target parse(String text) {
    if (text.isEmpty()) {
      throw HeadraceException.invalid("target", "is empty; " + FORMS);
    }
    if (URLS.stream().anyMatch(text::startsWith)) {
      throw HeadraceException.invalid(
          "target", text + " is a URL; " + FORMS + ", and tls() if the server is encrypted");
    }
    if (text.startsWith("/") || text.startsWith("./")) {
      return new Target("unix:" + text, "", "");
    }
    if (text.startsWith("unix:")) {
      return new Target(text, "", "");
    }
    boolean isName = text.startsWith("dns:");
    String name = text;
    if (isName) {
      name = text.startsWith("dns:///") ? text.substring(7) : text.substring(4);
    }
    name = withoutScheme(name);
    name = HOST_ONLY.matcher(name).matches() ? name + ":" + DEFAULT_PORT : name;
    var parts = HOST_AND_PORT.matcher(name);
    if (!parts.matches() || Integer.parseInt(parts.group(2)) > 65_535) {
      throw HeadraceException.invalid("target", text + " has no host and port; " + FORMS);
    }
    if (isName) {
      return new Target("", parts.group(1), parts.group(2));
    }
    return new Target(name, "", "");
  }

  boolean isName() {
    return address.isEmpty();
  }

  /** Whether it is on this machine: a Unix socket or a loopback address. */
  boolean isLocal() {
    if (address.startsWith("unix:")) {
      return true;
    }
    String name = isName() ? host : address.substring(0, address.lastIndexOf(':'));
    if (name.equals("localhost")) {
      return true;
    }
    String literal = name.replace("[", "").replace("]", "");
    if (!literal.matches("[0-9.]+|[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*")) {
      return false; // a name: it is not looked up for this
    }
    try {
      return InetAddress.getByName(literal).isLoopbackAddress();
    } catch (UnknownHostException noAddress) {
      return false;
    }
  }

  /** The addresses that a name has now. It waits for the answer. */
  List<Address> resolve() throws UnknownHostException {
    List<Address> found = new ArrayList<>();
    for (InetAddress one : InetAddress.getAllByName(host)) {
      String target =
          one instanceof Inet6Address
              ? "ipv6:[" + one.getHostAddress() + "]:" + port
              : "ipv4:" + one.getHostAddress() + ":" + port;
      Address made = new Address(target, host);
      if (!found.contains(made)) {
        found.add(made);
      }
    }
    return found;
  }

  @Override
  public String toString() {
    return isName() ? "dns:///" + host + ":" + port : address;
  }
}
