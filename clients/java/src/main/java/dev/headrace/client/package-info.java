/**
 * Calls Headrace servers: text generation over gRPC, one request at a time or many on one stream.
 *
 * <p>A {@link dev.headrace.client.HeadraceClient} has a connection to one server, or chooses among
 * several. It generates whole results, streams one request's output, runs many requests on one
 * stream ({@link dev.headrace.client.Session}) or a bounded number of them at a time ({@link
 * dev.headrace.client.Batch}), and calls tools ({@link dev.headrace.client.ToolRun}).
 *
 * <pre>{@code
 * try (HeadraceClient client = HeadraceClient.connect("localhost:50051")) {
 *   Request request = Request.text("Once upon a time").maxTokens(32).build();
 *   System.out.println(client.generate(request).text());
 * }
 * }</pre>
 *
 * <p>What fails does so with {@link dev.headrace.client.HeadraceException}, which has the server's
 * code, reason, refused fields and advice when to come again. The package tries again what may be
 * tried again without harm. Where a calling thread waits, an interrupt ends the wait with the code
 * CANCELLED and leaves the thread interrupted.
 *
 * <p>All objects may be used by several threads, unless they say otherwise. No method takes or
 * gives null, unless it says so.
 */
package dev.headrace.client;
